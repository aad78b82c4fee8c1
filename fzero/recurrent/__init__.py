"""Recurrent layers as single ops: `layers.run` puts them in the place of torch's functions in a trace."""
