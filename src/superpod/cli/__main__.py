"""`python -m superpod.cli` runs the command `recipes`, even if it is not on the PATH."""

from superpod.cli import main

if __name__ == "__main__":
    main()
