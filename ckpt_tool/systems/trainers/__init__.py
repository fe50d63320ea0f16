"""Trainers with models of their own (torchtune, OLMo-core): their names and recipe states."""
