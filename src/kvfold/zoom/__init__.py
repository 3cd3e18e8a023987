"""SeKV (arXiv 2606.31145): everything at two resolutions, zoomed in where the query looks."""
