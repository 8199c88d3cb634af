"""The error reference: every error of an installed package with its condition, its place and a fix. Never imports torch."""
