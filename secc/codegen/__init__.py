"""Codegen: planned IR in, a plan directory out. Text is rendered from `templates/`; a rank needs none of this
package."""
