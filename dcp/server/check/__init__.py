"""The offline check of a data folder: its files, and the program that dcpctl verify runs."""
