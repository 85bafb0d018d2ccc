"""Runs at the start of every Python process that has this folder on its path."""

import torchvision_operators

torchvision_operators.define_when_needed()
