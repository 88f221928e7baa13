"""``python -m ckpt_core.cli``: the command line without the installed script."""

from ckpt_core.cli import main

if __name__ == "__main__":
    main()
