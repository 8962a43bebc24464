"""Where models come from: the store, downloads, and the packages they need."""
