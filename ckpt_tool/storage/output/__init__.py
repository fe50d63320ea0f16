"""Where an output grows on a disk: staging, journals, claims, what --force replaces and what is removed."""
