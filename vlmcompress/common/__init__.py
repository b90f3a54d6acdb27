"""What every part of the package may use, and what knows none of them."""
