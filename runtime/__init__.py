"""What a rank runs. It needs torch, triton, safetensors and the standard library; importing the package
itself imports none of them."""

if __name__ != "secc.runtime":
    raise ImportError(
        "this folder is the package secc.runtime; import it under that name, or its classes exist twice"
    )
