"""The method inside other engines. The host engine is imported inside functions only."""
