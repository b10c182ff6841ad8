"""What some versions of torch, or a lesser CPU, do not do."""

import functools

import torch


@functools.cache
def torch_has_lstm(low: torch.dtype) -> bool:
    """Say whether torch.autocast runs an LSTM on this CPU.

    oneDNN has one in bf16 from AVX-512 on, in fp16 from AMX-FP16 on; where it has none,
    torch.autocast fails.
    """
    lstm, x = torch.nn.LSTM(4, 4), torch.ones(1, 1, 4)
    try:
        with torch.autocast("cpu", low):
            lstm(x)
    except RuntimeError as error:
        if "LSTM forward propagation primitive" not in str(error):
            raise
        return False
    return True
