"""Drafters: what proposes the tokens of a draft tree."""
