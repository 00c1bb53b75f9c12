"""``python -m pageloom``."""

from pageloom.cli import main

main()
