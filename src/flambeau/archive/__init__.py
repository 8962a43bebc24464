"""Model archives: what is in one, how it is packed and how it is unpacked without harm."""
