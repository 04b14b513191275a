// x to the power y, bit for bit that of power.rs, where it is explained. One of the two, as REAL is.
#ifdef REAL_IS_DOUBLE
FN double power(double x, double y) {
  const double log_terms[] = {
    2.8853900817779268, 0.9617966939259756, 0.5770780163555853, 0.4121985831111324,
    0.3205988979753252, 0.2623081892525388, 0.22195308321368667, 0.19235933878519512,
    0.16972882833987804, 0.15186263588304877, 0.1373995277037108, 0.12545174268599682};
  const double exp_terms[] = {
    1.0, 0.6931471805599453, 0.2402265069591007, 0.055504108664821576, 0.009618129107628477,
    0.0013333558146428443, 0.0001540353039338161, 1.525273380405984e-05, 1.3215486790144307e-06,
    1.0178086009239699e-07, 7.054911620801122e-09, 4.4455382718708106e-10, 2.56784359934882e-11,
    1.3691488853904124e-12, 6.778726354822543e-14};
  const double round = 6755399441055744.0;  // 1.5 * 2^52
  const unsigned long long bias = 1024ull << 52;
  const bool lifted = x < 2.2250738585072014e-308;
  const unsigned long long bits = bits_of(lifted ? x * 18014398509481984.0 : x);
  const unsigned long long biased = (bits - bits_of(0.7071067811865476) + bias) >> 52;
  const double m = double_of(bits - (biased << 52) + bias);
  double exponent = double_of(biased + bits_of(round)) - (round + 1024.0);
  if (lifted) exponent = exponent - 54.0;

  const double z = (m - 1.0) / (m + 1.0);
  const double z2 = z * z;
  double series = log_terms[11];
  for (int k = 10; k >= 0; k--) series = series * z2 + log_terms[k];
  const double t = y * (series * z + exponent);

  double within = t > 1100.0 ? 1100.0 : t;
  within = within < -1100.0 ? -1100.0 : within;
  const double rounded = within + round;
  const double f = within - (rounded - round);
  double result = exp_terms[14];
  for (int k = 13; k >= 0; k--) result = result * f + exp_terms[k];
  const unsigned long long n = bits_of(rounded) - bits_of(round) + 2200;
  const unsigned long long half_n = n >> 1;
  result = result * double_of((half_n - (1100 - 1023)) << 52) * double_of((n - half_n - (1100 - 1023)) << 52);
  if (x == 0.0 && y > 0.0) result = 0.0;
  return x - x == 0.0 ? result : x;
}
#else
FN float power(float x, float y) {
  const float log_terms[] = {
    2.88539f, 0.9617967f, 0.57707804f, 0.41219857f, 0.3205989f};
  const float exp_terms[] = {
    1.0f, 0.6931472f, 0.2402265f, 0.05550411f, 0.009618129f, 0.0013333558f, 0.0001540353f,
    1.5252734e-05f};
  const float round = 12582912.0f;  // 1.5 * 2^23
  const bool lifted = x < 1.17549435e-38f;
  const int bits = (int)bits_of(lifted ? x * 16777216.0f : x);
  const int e = (bits - (int)bits_of(0.70710678f)) >> 23;
  const float m = float_of((unsigned int)(bits - (int)((unsigned int)e << 23)));
  const float exponent = (float)(lifted ? e - 24 : e);

  const float z = (m - 1.0f) / (m + 1.0f);
  const float z2 = z * z;
  float series = log_terms[4];
  for (int k = 3; k >= 0; k--) series = series * z2 + log_terms[k];
  const float y_high = float_of(bits_of(y) & ~0xffu);
  const float high = y_high * exponent;
  const float low = (y - y_high) * exponent + y * (series * z);
  const float t = high + low;

  float within = t > 252.0f ? 252.0f : t;
  within = within < -252.0f ? -252.0f : within;
  const float rounded = within + round;
  const float f = (high - (rounded - round)) + low;
  float result = exp_terms[7];
  for (int k = 6; k >= 0; k--) result = result * f + exp_terms[k];
  const int n = (int)bits_of(rounded) - (int)bits_of(round);
  const int half_n = n >> 1;
  result = result * float_of((unsigned int)(half_n + 127) << 23) * float_of((unsigned int)(n - half_n + 127) << 23);
  if (t > 252.0f) result = float_of(0x7f800000u);
  if (t < -252.0f) result = 0.0f;
  if (x == 0.0f && y > 0.0f) result = 0.0f;
  return x - x == 0.0f ? result : x;
}
#endif
