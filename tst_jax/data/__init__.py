"""Corpora in, a prepared token store on disk, and the pipelines that read it."""
