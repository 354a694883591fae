"""Policies of others, written again from their papers: what dynamix is measured beside."""
