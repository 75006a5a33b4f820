"""`python -m superpod.launchers.cli`, where the command `recipes` is not on the PATH."""

from superpod.launchers.cli import main

if __name__ == "__main__":
    main()
