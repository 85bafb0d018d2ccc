"""Train an EAGLE-3 head on a model's own answers: prompts -> answers -> train -> evaluate -> export. See README.md."""
