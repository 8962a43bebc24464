"""Model archives: manifest, packing and safe unpacking."""
