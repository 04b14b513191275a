// What every rule may use beside + - * /, for REAL = float or double. A dialect comes first.

// The larger; a when the two compare equal or not at all.
FN REAL at_least(REAL a, REAL b) { return b > a ? b : a; }
// The smaller; a when the two compare equal or not at all.
FN REAL at_most(REAL a, REAL b) { return b < a ? b : a; }
FN bool is_finite(ACC x) { return x - x == 0; }
