"""Measures and checks this project. README.md lists what each script measures."""
