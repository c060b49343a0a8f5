"""What can be asked over HTTP. Knows neither mlx, mlx_lm nor the store."""
