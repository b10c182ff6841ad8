"""The one exception that means "what you gave cannot be used".

In: nothing. Out: `UserError`, which the command line prints as one line.
"""


class UserError(ValueError):
    """What the user gave cannot be used; the text says what would be right.

    Why: the command line turns this into one line and a non-zero exit, and lets any
    other exception through as the defect it is. A program that already catches
    `ValueError` keeps working.
    """
