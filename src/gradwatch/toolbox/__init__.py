"""The toolbox of hooks for people, apart from the watching: capture, edit, full backward hooks, Grad-CAM."""
