"A workbench for mixture-of-experts models served from SSD with predicted routing."
__version__ = "0.1.0"

from edge0_lab.blas import load_blas

load_blas()  # must run before mlx.core is imported, see the page `blas`
