// bf16 by its bits, on every device alike: to the nearest, ties to even; a NaN stays quiet and keeps its sign.
FN float widen_bf16(unsigned short bits) { return float_of((unsigned int)bits << 16); }
FN unsigned short narrow_bf16(float wide) {
  unsigned int bits = bits_of(wide);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (unsigned short)((bits >> 16) | 0x0040u);
  return (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
