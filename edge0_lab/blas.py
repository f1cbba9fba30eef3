def load_blas(): pass
