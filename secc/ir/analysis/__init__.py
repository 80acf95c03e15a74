"""Questions about a case that several parts of the compiler ask. Imports `ir.dialect`."""
