"""`python -m superpod.cli`, where the command `recipes` is not on the PATH."""

from superpod.cli import main

if __name__ == "__main__":
    main()
