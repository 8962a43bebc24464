"""Fuzzing: targets take bytes and raise if a promise is broken; found inputs are kept in the corpus."""
