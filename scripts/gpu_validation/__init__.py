"""Runs on a GPU machine what the tests of the SGLang plug-in cannot run on a CPU; see `__main__.py`."""
