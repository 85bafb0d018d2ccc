"""Recipes: what was done to make the artefacts that the package ships."""
