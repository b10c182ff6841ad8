"""Other libraries' interfaces over halfstep: thin, optional, each in a room of its own.

In: a program written for another library. Out: the same program, on halfstep.
"""
