"""The `forebay` command. `main` has the commands; their work is in the modules beside it, imported when a command runs."""
