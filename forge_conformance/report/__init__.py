"""Telling people what was found: the verdict, and its text in the terminal."""
