"""SeKV (arXiv 2606.31145): everything at two resolutions, zoomed in where the query looks."""

from kvfold.zoom.build import build_cache

__all__ = ["build_cache"]
