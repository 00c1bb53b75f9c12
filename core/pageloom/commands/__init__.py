"""The commands, one per module. Importing one imports no torch: what is heavy waits until it runs.

`pageloom.cli` adds each to the application. A command raises `PageloomError` for whatever the
user can put right; `pageloom.cli.main` prints it.
"""
