//! The angles of positions, shared with [`crate::ops::positions::sinusoidal_positions`].

/// The angles `p theta_i` of positions `p`.
#[derive(Clone, Debug)]
pub struct Angles {
    /// The position of the first row. As a float it cannot overflow when rows are added.
    pub first_position: f64,
    /// `theta_i` of each pair.
    pub rates: Vec<f64>,
}

impl Angles {
    /// Sine and cosine of each pair's angle in a row.
    pub fn sin_cos(&self, row: usize) -> impl Iterator<Item = (f64, f64)> {
        let position = self.first_position + row as f64;
        self.rates.iter().map(move |rate| (position * rate).sin_cos())
    }
}

/// The rate of pair `i`: `theta^(-2i/W)`.
pub fn rate(theta: f64, i: usize, width: usize) -> f64 {
    theta.powf(-2.0 * i as f64 / width as f64)
}
