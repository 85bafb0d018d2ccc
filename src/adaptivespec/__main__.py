"""`python -m adaptivespec`: the command line, the same as the `adaptivespec` script."""

from adaptivespec.cli.main import main

if __name__ == "__main__":
    main()
