"""Images → classes, masks and boxes."""
