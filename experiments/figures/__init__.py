"""Figures: each module is one `draw(frame, ax) -> DataFrame`, pure, returning the table it plotted."""
