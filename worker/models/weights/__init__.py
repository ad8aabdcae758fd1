"""Reading weights: one class per file format, all giving the same names, shapes and layout."""
