"""Defines what is minimised over whole answers, and in comparison with a teacher."""
