"""`python -m halfstep`, which torchrun starts in each process."""

from halfstep.cli import main

if __name__ == "__main__":
    main()
