"""What a probe has looked at in one step: a flag for each name, or full statistics.

In: named tensors as they come by. Out: flags and statistics by name, on the device
until they are fetched. A tensor that comes by again under another name, unchanged, is
not read again: a layer's output is often its last part's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from halfstep import formats, late
from halfstep.stats import dense
from halfstep.tensor_counts import DTYPES, Counts, add_

if TYPE_CHECKING:
    from collections.abc import Sequence

    from halfstep.formats import FloatFormat

Key = tuple[int, str]
"""Number of a name, and the dtype that came by under it."""
_WORDS = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES}
_Seen = tuple[StorageWeakRef, object, "bool | Tensor | Counts"]


def numbers(tensor: Tensor) -> Tensor | None:
    """Return a tensor's numbers as plain floats; None of one that has none."""
    values = tensor.detach()
    # A nested tensor may call itself strided, and has no shape.
    plain = type(values) is Tensor and values.layout is torch.strided
    if not plain or values.is_nested:
        values = dense(values)
        values = values.values() if values.is_nested else values
    if values.dtype in DTYPES:
        return values if values.numel() else None
    if values.is_complex():
        return numbers(torch.view_as_real(values.resolve_conj()))
    return None


def non_finite(values: Tensor) -> bool | Tensor:
    """Return whether there is an inf or a NaN: at once on a CPU, else a magnitude.

    Why: on a CPU a sum takes a third of the time of both extremes, and is inf or NaN if
    a part is. Where it only overflowed, the extremes tell. A GPU has one kernel for the
    largest magnitude, which is inf or NaN if one is there; shape ().
    """
    if not late.on_host(values.device):
        peak: Tensor = torch.linalg.vector_norm(values, torch.inf)
        return peak
    wide = torch.float32 if values.dtype == torch.float16 else None
    total: float = values.sum(dtype=wide).item()
    if total - total == 0:
        return False
    low, high = torch.aminmax(values)
    return not (bool(low.isfinite()) and bool(high.isfinite()))


class Looks:
    """What has come by since the last `clear`."""

    def __init__(self, casts: tuple[FloatFormat, ...], *, full: bool) -> None:
        """Take what to look for.

        Args:
            casts: Of the statistics.
            full: Take statistics; otherwise flags.
        """
        self._casts = casts
        self.full = full
        self.came: dict[int, None] = {}
        """Numbers of names in the order in which they first came by."""
        self.bad: dict[int, bool] = {}
        """Number of a name -> whether it was not finite."""
        self.peaks: list[tuple[int, Tensor]] = []
        """The same where the host would have to wait: magnitudes, shape ()."""
        self.rows: dict[Key, Counts] = {}
        self._seen: dict[int, _Seen] = {}

    def look(
        self, number: int, tensor: Tensor, *, anew: bool = False, known: bool = True
    ) -> None:
        """Look at one tensor.

        Args:
            number: Of its name.
            tensor: Of any dtype; only floating ones are looked at.
            anew: Statistics replace those of the same name, and do not add to them.
            known: It may be one that came by before, unchanged.
        """
        self.came.setdefault(number)
        with torch._C._DisableAutocast():  # noqa: SLF001
            found, dtype = self._found(tensor, known=known)
        if isinstance(found, Counts):
            key = number, dtype
            before = None if anew else self.rows.get(key)
            self.rows[key] = found if before is None else before.plus(found)
        elif isinstance(found, bool):
            self.bad[number] = found or self.bad.get(number, False)
        elif found is not None:
            self.peaks.append((number, found))

    def look_at_all(self, named: Sequence[tuple[int, Tensor]]) -> None:
        """Look at tensors that are all there; on a GPU, for flags, by one kernel."""
        groups: dict[object, list[tuple[int, Tensor]]] = {}
        for number, tensor in named:
            values = numbers(tensor)
            if values is None:
                continue
            self.came.setdefault(number)
            if self.full:  # no two share memory
                self.look(number, values, anew=True, known=False)
            elif late.on_host(values.device):
                self.bad[number] = bool(non_finite(values))
            else:
                at = values.device, values.dtype
                groups.setdefault(at, []).append((number, values))
        for group in groups.values():
            norms = torch._foreach_norm([v for _, v in group], torch.inf)  # noqa: SLF001
            self.peaks += [(n, p) for (n, _), p in zip(group, norms, strict=True)]

    def _found(
        self, tensor: Tensor, *, known: bool
    ) -> tuple[bool | Tensor | Counts | None, str]:
        values = numbers(tensor)
        if values is None:
            return None, ""
        dtype = _WORDS[values.dtype]
        # Of an inference tensor no version tells whether it was written to.
        if not known or values.is_inference():
            return self._measured(values), dtype
        storage = values.untyped_storage()
        place = storage._cdata  # noqa: SLF001
        form = (
            *(values._version, values.storage_offset()),  # noqa: SLF001
            *(values.shape, values.stride(), dtype),
        )
        seen = self._seen.get(place)
        # The reference keeps the number from being given to another storage.
        if seen is not None and seen[1] == form:
            return seen[2], dtype
        found = self._measured(values)
        alive = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._seen[place] = alive, form, found
        return found, dtype

    def _measured(self, values: Tensor) -> bool | Tensor | Counts:
        if not self.full:
            return non_finite(values)
        counted = Counts.none(len(self._casts), values.device)
        add_(counted, values, self._casts)
        return counted

    def flags(self) -> tuple[list[int], list[Tensor]]:
        """Return numbers of names, perhaps twice, and as many flags.

        Returns:
            Numbers; rows of bool, one for each dtype and device, together as long.
        """
        order, rows = list(self.bad), []
        if self.bad:
            rows.append(torch.tensor(list(self.bad.values())))
        groups: dict[object, list[tuple[int, Tensor]]] = {}
        for number, peak in self.peaks:
            groups.setdefault((peak.device, peak.dtype), []).append((number, peak))
        for group in groups.values():
            order += [number for number, _ in group]
            rows.append(~torch.isfinite(torch.stack([peak for _, peak in group])))
        return order, rows

    def clear(self) -> None:
        """Forget all."""
        self.came = {}
        self.bad, self.peaks, self.rows, self._seen = {}, [], {}, {}


def label(name: str, dtype: str, first: str) -> str:
    """Return the name of statistics: with the dtype where another came by first."""
    return name if dtype == first else f"{name} ({formats.word(getattr(torch, dtype))})"
