"""The error reference: each error of an installed package with condition, place and fix. Never imports torch."""
