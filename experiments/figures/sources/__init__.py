"""What figures draw from, read from stored cells: each module is one `load_NAME(cells) -> DataFrame`."""
