"""What runs inside each rank. The parent imports none of this, so it starts without PyTorch and without MPI."""
