"""The conversion: chosen tensors -> ordered passes -> what is wanted -> a plan -> a committed output."""
