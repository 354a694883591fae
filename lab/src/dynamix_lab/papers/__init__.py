"""Policies in the form of the papers on which this project is based."""
