"""The composition root: the one package that names every class and puts a run together from its config."""
