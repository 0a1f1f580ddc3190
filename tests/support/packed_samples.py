"""Matrices that bitsandbytes 0.50.2 and compressed-tensors 0.20.0 packed and dequantised on a CPU.

They come from quantize_4bit(compress_statistics=True) and int8_vectorwise_quant, and from the
schemes NVFP4A16 and MXFP4A16, of normal values. Those with actorder or negative scales come from
PackedQuantizationCompressor, IntQuantizationCompressor and dequantize of compressed-tensors 0.12.2.
"""

import base64

import torch
from torch import Tensor


def sample(kind: str) -> dict[str, Tensor]:
    """The tensors of a matrix of a kind by suffix, and its dequantised values."""
    return {name: _tensor(*each) for name, each in _SAMPLES[kind].items()}


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=dtype).view(shape)


_SAMPLES = {
    "nf4": {
        "weight": (
            torch.uint8,
            (120, 1),
            "SbJoVLU1q4sm5oq0ZhYaM3eOtUUs02aYZnYDa9dRtmqIWyFEPaY1OgmpY+xWvDitS8KHWp4u"
            "pqIlqEWqPSpanaijYwPhWoE9ltL0t3RXskiyeOWEREg2yFO4tJ6b4wI3aDvEJgeqqXeURFCT"
            "Mltlx5rGdZU2dFhs",
        ),
        "weight.absmax": (
            torch.uint8,
            (4,),
            "8hAA+g==",
        ),
        "weight.quant_map": (
            torch.float32,
            (16,),
            "AACAv7E5Mr8wawa/oDLKvk2ikb4/NT2+cXi6vQAAAAD/+qI948okPt0EfD46A60+uKThPqsH"
            "ED+zEzk/AACAPw==",
        ),
        "weight.nested_absmax": (
            torch.float32,
            (1,),
            "gE7lPg==",
        ),
        "weight.nested_quant_map": (
            torch.float32,
            (256,),
            "MzN+v5qZer8AAHe/ZmZzv83Mb78zM2y/mplovwAAZb9mZmG/zcxdvzMzWr+amVa/AABTv2Zm"
            "T7/NzEu/MzNIv5qZRL8AAEG/ZmY9v83MOb80Mza/mpkyvwAAL79mZiu/zcwnvzQzJL+amSC/"
            "AAAdv2ZmGb/NzBW/NDMSv5qZDr8AAAu/ZmYHv8zMA78zMwC/MjP5vgAA8r7MzOq+mpnjvmZm"
            "3L4zM9W+AADOvszMxr6amb++Zma4vjMzsb4AAKq+zMyivpqZm75mZpS+NDONvgAAhr6ZmX2+"
            "MzNvvs3MYL5mZlK+AABEvpqZNb4zMye+zcwYvmZmCr4AAPi9NDPbvYXryb33KMS9Z2a+vdej"
            "uL1I4bK9uB6tvSpcp72amaG9CtebvXsUlr3rUZC9XY+Kvc3MhL17FH69XY9yvT0KZ70fhVu9"
            "AABQveF6RL3D9Ti9o3AtvYXrIb1nZha9SOEKvVK4/rwVrue816PQvJqZubxdj6K8H4WLvMP1"
            "aLxI4Tq8ZDsfvBgEFrzNzAy8gZUDvGq89LvTTeK7O9/Pu6RwvbsNAqu7dJOYu90khruKbGe7"
            "XI9Cuy2yHbv8qfG6ne+nuv9ld7o+6Fm6gGo8usHsHroBbwG6g+LHuQXnjLkL1yO5Sx+6uLPv"
            "irg0gDe4BkKyt/8FAreUGlq2t6MTtQAAAAC3oxM1lBpaNv8FAjcGQrI3NIA3OLPvijhLH7o4"
            "C9cjOQXnjDmD4sc5AW8BOsHsHjqAajw6PuhZOv9ldzqd76c6/KnxOi2yHTtcj0I7imxnO90k"
            "hjt0k5g7DQKrO6RwvTs73887003iO2q89DuBlQM8zcwMPBgEFjxkOx88SOE6PMP1aDwfhYs8"
            "XY+iPJqZuTzXo9A8Fa7nPFK4/jxI4Qo9Z2YWPYXrIT2jcC09w/U4PeF6RD0AAFA9H4VbPT0K"
            "Zz1dj3I9exR+Pc3MhD1dj4o961GQPXsUlj0K15s9mpmhPSpcpz24Hq09SOGyPdejuD1nZr49"
            "9yjEPYXryT00M9s9AAD4PWZmCj7NzBg+MzMnPpqZNT4AAEQ+ZmZSPs3MYD4zM28+mZl9PgAA"
            "hj40M40+ZmaUPpqZmz7MzKI+AACqPjMzsT5mZrg+mpm/PszMxj4AAM4+MzPVPmZm3D6ameM+"
            "zMzqPgAA8j4yM/k+MzMAP8zMAz9mZgc/AAALP5qZDj80MxI/zcwVP2ZmGT8AAB0/mpkgPzQz"
            "JD/NzCc/ZmYrPwAALz+amTI/NDM2P83MOT9mZj0/AABBP5qZRD8zM0g/zcxLP2ZmTz8AAFM/"
            "mplWPzMzWj/NzF0/ZmZhPwAAZT+amWg/MzNsP83Mbz9mZnM/AAB3P5qZej8zM34/AACAPw==",
        ),
        "weight.quant_state.bitsandbytes__nf4": (
            torch.uint8,
            (165,),
            "eyJxdWFudF90eXBlIjogIm5mNCIsICJibG9ja3NpemUiOiA2NCwgImR0eXBlIjogImZsb2F0"
            "MzIiLCAic2hhcGUiOiBbNiwgNDBdLCAibmVzdGVkX2Jsb2Nrc2l6ZSI6IDI1NiwgIm5lc3Rl"
            "ZF9kdHlwZSI6ICJmbG9hdDMyIiwgIm5lc3RlZF9vZmZzZXQiOiAyLjU5ODg5NDU5NjA5OTg1"
            "MzV9",
        ),
        "values": (
            torch.float32,
            (6, 40),
            "jB9YvwiO9D50YIA/xHrHv9Vcir6c3XE+1mQMv4wfWL90YIA/1mQMv0sIlr/WZAy/CwA7P3Rg"
            "gD+c3XE+dGCAP8R6x7/VXIq+IFQJQNVcir6c3XE+CwA7P3RggD+MH1i/1VyKvtVcir6jPgTA"
            "1VyKvqM+BMALADs/SwiWv0sIlr8AAAAAAAAAAJzdcT4gVAlAdGCAP9ZkDL+MH1i/1mQMv8R6"
            "x7/lbac/Kb7VP0sIlr/VXIq+1VyKvgiO9D6c3XE+1VyKvtVcir4AAAAA1VyKvkD0PcBLCJa/"
            "1VyKvnRggD8pvtU/AAAAANZkDL+jPgTAdGCAP9Vcir7VXIq+CwA7P5vBNz6bwTc+wFPVvjgR"
            "Qz+7jZe/y/HIv9YyJL/WMiS/CPljv9xjoj+OEg4/nD1Svgj5Y7/AU9W+CPljv44SDj8UURDA"
            "osy5Po4SDj+izLk+nD1Svgj5Y79lq9A/PGh+P8BT1b6cPVK+OBFDPzxofj8I+WO/m8E3Po4S"
            "Dj/cY6I/1jIkvzgRQz88aH4/u42Xv5vBNz4AAAAAwFPVvo4SDj+izLk+ZavQP7uNl79lq9A/"
            "jhIOP5w9Ur6OEg4/u42Xv7uNl7/AU9W+jhIOP5vBNz7WMiS/wFPVvo4SDj+OEg4/CPljv9xj"
            "oj+7jZe/jhIOP8BT1b6OEg4/osy5Ptxjoj84uQc/Z4svPji5Bz/7yFm/bNhIvvvIWb8S3gnA"
            "+8hZvy5Yxz/19r+/QMvLvji5Bz9niy8+9fa/v/vIWb8XIps/Dn+xPmzYSL4XIps/7seQvxLe"
            "CUBg3By/nlk6PwAAAAAAAAAAYNwcv0DLy74AAAAAnlk6P+7HkL9g3By/Z4svPp5ZOj/ux5C/"
            "AAAAAGeLLz4uWMc/QMvLvmeLLz5g3By/YNwcv2DcHL9g3By/Z4svPvvIWb9s2Ei+xglzP2eL"
            "Lz5Ay8u++8hZv55ZOj9niy8+nlk6P2DcHL8Of7E+LljHPw5/sT6eWTo/LljHP/vIWb8S3gnA"
            "7seQv/vIWb8AAAAAIraMvrj4dT5PlJi/W46CP4RFqj/Iylu/rN3KvyK2jL7CLUHAAAAAALYs"
            "Pj+2LD4/tiw+P9O0+D4AAAAAAAAAANO0+D7Iylu/yMpbv8jKW7/2xg6/wi1BwNO0+D5PlJi/"
            "T5SYv6zdyr/2xg6/W46CPyK2jL72xg6/hEWqPwAAAADTtPg+tiw+P4RFqj8itoy+AAAAAPbG"
            "Dr/TtPg+9sYOv0+UmL8itoy+AAAAAMjKW7/2xg6/uPh1PiK2jL6ERao/",
        ),
    },
    "int8": {
        "weight": (
            torch.int8,
            (4, 8),
            "tSRSgfEaxa6UZH+u7O0nFIEXIBH5ymM3qnmBNdNAHnw=",
        ),
        "SCB": (
            torch.float32,
            (4,),
            "AMCxPwAA0j8AgBBAAACbPw==",
        ),
        "values": (
            torch.float32,
            (4, 8),
            "4vBRvxaLyT4SiWU/AMCxv+jzJ74ej5E+TyclvxKJZb8qlbK/tVqlPwAA0j8ul4e/kUiEvq1W"
            "e770+QA/kUiEPgCAEMC1WtE+R6MRP3u9mj673f69h8N1v5FI4T+hUHo/2OtRv1utkz8AAJu/"
            "vV4BP1+v275xOBw/6nSSPq1Wlz8=",
        ),
    },
    "nvfp4": {
        "weight_global_scale": (
            torch.float32,
            (1,),
            "s15gRA==",
        ),
        "weight_packed": (
            torch.uint8,
            (4, 32),
            "SgnZoamnFY1i79lGSkTnbikeohuzEZdLyPRUppYOLnQ+O90X/Wlkj5S6+VKAhEeOs1z91Tdu"
            "fSSz8f4Q4jsxTN12SsZUZeCosqKV/UJVyhE36eGY5ra21I66/kI1SEli7+QszDPu1yUELFk3"
            "6OvyBL9g/fGfpJVl/tNLVTaxvBk=",
        ),
        "weight_scale": (
            torch.float8_e4m3fn,
            (4, 4),
            "fnl+d3l8en55e3h9dXp4eg==",
        ),
        "values": (
            torch.bfloat16,
            (4, 64),
            "AL+AP4C+AACAvsC/gD4Av4C+AL9AQAC/wD+APsC/AICkPqQ/9r+kvyS+dr+kPyQ/pL4kPyQ/"
            "JD/2P6S/pL+kP4C+AD8AwIA+AD8Av0C/gD5AP0C/gD6APkBAgL5Av4A/AIAJvwk/zb8JP00/"
            "iT+Jvok/Cb6JvwAAib+JPgk/zT+kv/Y+9r72Pna/dr/2PyQ+dr/2vyS+pD8kP6Q/9r8AgFs/"
            "W77bviS/W74kwNs+pD8AAACAWz8AgCRAWz/bvwCACT8Jvze/iT+JvwnAiT+JvwlACT+3v7c/"
            "ib8JQDc/tz5AP0C/gD5AwADAQMAAAIA+AD8AwEC/QD+APkA/gL+AP3a/dr+kP/Y/pL4kP6Q/"
            "JL8kP3Y/dj+kPwAApL8AgKS+yT4Xv8k+yb6XP0m+l78XwMk+ST+XP5c/yb5Jv0k+ST7bP9s+"
            "Er6SvxI+kr8AgBK+kj+Sv5I/276SP9u+Ej9bv+2/AIDtvjK/7b8ywO0+bT+yPzI/AIBtP22+"
            "bT/tPu0/sr9tv+0+bb/tvm0+7b7tvrI+sj5tv22/sj8yvzI/bT43PwAAN7+3Pje+iT8JQAk/"
            "AIC3vwm/t7+3PgnANz8AANu/274AAJI/W7/bvxI+27/bvxK+Ej+Svls/Er5bP5I/t78JwAk/"
            "ib8Jvzc/iT+JP7c/CT83Pgm/N78Jvze+Nz4=",
        ),
    },
    "mxfp4": {
        "weight_packed": (
            torch.uint8,
            (4, 32),
            "PZJaWgFN4VRLuYWsocma1LSUkEoTmWxW5K2duZuqjByxglqpCa0BxBI0ChqkYMA8w8ChLSFb"
            "PcUMzRiK6MQpWcS9ZOHAIdMiDQqiVApYsbpEkZBVwkqoRayYFTqpFakgXCiLGbFBlaClkciT"
            "skqSQrCmPSvotZwaxVmaEZSdDRo=",
        ),
        "weight_scale": (
            torch.uint8,
            (4, 2),
            "fn5+fn5+fn4=",
        ),
        "values": (
            torch.bfloat16,
            (4, 64),
            "wL9APwA/gL4Av8A/AL/AP4A+AADAv4A/gD4AwIA/wD9Av4A/gL5Av8A/AICAvwC/gD4Av4C+"
            "gL8Av4C+gD/Av4A/QL+AP4C+AACAvgC/gD9AP4A+gL6AvoC/AEAAQMA/gD8AwMC/AL/Av4C+"
            "gL5Av0C/gL4AvwC/gL8AgIC/gD6APkC/AD8AgAC/wD+AvgC/gL4AAMC/AL+APgAAgD+AvwA/"
            "gD6AP0A/AL8AAAC/gD6APwC/AAAAQAAAgL+Av0A/QD+AvwAAgL+APgC/wL8AP4A+AD9Av8A/"
            "wL9AP8A/gL+AvwAAwL+AvwCAgD4AvwCAAIAAwIA/gL+AvgA/gL7AP4A/gL/Av0C/gD8AQIA+"
            "AMAAAIC/gD4AP0A/wL8APwA/wL8AAAC/AAAAPwC/gD/APwC/AAAAgMA/gD5AvwC/QL+AP4A/"
            "gD6AvgAAgL7AP8A/AD+AvwC/gD8AgAC/wD+AP4C/AL8AgIC+wD+APgC/QD+AvgC/wD+APoC+"
            "AL8AAAA/gL/APwCAAD9AvwCAgL6APoA+QL+APoA/wD+AvgAAAL/APwC/gD6AvgCAgL9AP4C+"
            "AD9AvwC/gD8AP4C+AD+APwAAQL8AQAC/wL9AP0C/AD8AgADAwD9Av4C/gL4Av4A+wD+Av4C+"
            "wD8Av4C+gD6APoA/gL7Av4C+wL8AAAC/gD4=",
        ),
    },
    "packed 4, actorder": {
        "weight_shape": (torch.int64, (2,), "CAAAAAAAAABAAAAAAAAAAA=="),
        "weight_packed": (
            torch.int32,
            (8, 8),
            "v1afdptiqUn/WUZqiVl/+kivvw7qZ4VZvezGg8WPya/ku4k3F0lUrVMXiojVq6+JlBpTtacf"
            "hVhnOqolpfJroIx8yGVkdKj8sYSSZAS4aGXG+RGfgbpwbETJtkRXJGRoTTwctpt4oVepWlbH"
            "cp8aOneH33lT53g85/o0hWHpuZe2o6dHSHEpRUCBaQcFaVUHBUdlcXmkxmVLVRBAliiPyc7c"
            "u42LV6d8zN2EZ0iaG5qY2M9n67n3f8VzqXVKq7iol2qeqKC+dJfVl3aBFix8TOU2NucJgbgG"
            "yXv6SQOemIeYfF/Vo93sXKTYiIZFvY2NT9V+m6a6vF7V+shQYLn8iA==",
        ),
        "weight_zero_point": (torch.int32, (1, 4), "alaXZWurpbamZnWIeaW3ug=="),
        "weight_scale": (
            torch.bfloat16,
            (8, 4),
            "tj6lPr8+bD6YPoc+qj50Pmc+nT6BPrI+uT6BPos+lT6CPps+YD69PsA+qz7JPqE+ej58PpU+"
            "yT6iPq0+hT6zPg==",
        ),
        "weight_g_idx": (
            torch.int32,
            (64,),
            "AQAAAAMAAAABAAAAAAAAAAMAAAAAAAAAAgAAAAEAAAAAAAAAAwAAAAIAAAADAAAAAgAAAAEA"
            "AAABAAAAAgAAAAAAAAABAAAAAAAAAAMAAAACAAAAAgAAAAAAAAACAAAAAAAAAAIAAAADAAAA"
            "AQAAAAMAAAACAAAAAwAAAAEAAAADAAAAAgAAAAAAAAABAAAAAwAAAAAAAAABAAAAAgAAAAAA"
            "AAABAAAAAgAAAAEAAAAAAAAAAwAAAAEAAAAAAAAAAwAAAAMAAAABAAAAAQAAAAIAAAABAAAA"
            "AgAAAAAAAAAAAAAAAAAAAAAAAAADAAAAAgAAAAMAAAADAAAAAgAAAA==",
        ),
        "values": (
            torch.bfloat16,
            (8, 64),
            "pT/sPs6/5L+xP7a+AAClv7Y+AAC/vzG/jz+lviW/P7/kP6U/tr5svwAAP78AAAAAtr4/PwAA"
            "+L+xP78+bD6lP2y+P7/kP6W+sT+2Png/D8AAAHg/vz7Ov+S/bL4lv+S/bD/sPqU+eD8AAKU+"
            "j782v+S/Nj/kP2y+jz8xP7E/vz8Hv9Y/qT++P/Q+GD9/v0q/mD63v6q+N7//v4e+7D8AAGS/"
            "h76YPre/AAAqvxg/Kr+Yvn8/dD+HP/Q/AAD0Pgc/N7+qvpg/qb90v5i+h76qPpg+hz/UP6m/"
            "mL50Pgc/mL4AAHS+hz9KvwAAhz/Uv5i/mL6YP5i/9D+qPnS+1r8AAJ0+hj+dPmc+hj+tP4G+"
            "xL/nvrI+Ab8yPwE/nb6dPhFAkL8AAOe+hj+Bv0I/574AAOe+wr+GPwAAhj8AAAAAxL+yPsI/"
            "LT+dP7K/kL+dP0I/kL9sv4E/AACtvzI/nT4AALK+sr4dv50+AAAAAAG/575nPme+576GvwG/"
            "sj6GPwAAQj/gvwE/Ob8VP7m/AACBPgtAlb4LP2C/rr8AAEK/i765PwAA5z+6vwAAi745P9A/"
            "i7+LPro/gb4AAK6/AADiv2C/iz45PwG/uj85QIG+iz45v6G/iz6BP4s/YL8BPzm/YL+VPwAA"
            "oT8Lv+K/i76LP7m/uT65P5U/UD+VPmC/UD+bPr0/G79DPwAAQz/gPpu+gj6Ov2C/AABgP2i/"
            "AABgvuS/m77Dv70+YD9gPgAAjL8Cv4y/PT+bPj2/AAAAAMK/Pb+MvwAAm749v4K+m7/gPgI/"
            "Gz9gvsI/gr7sPwAAgr69P46/AAAAAIy/m7+Mv0O/gr4CP4I+7L8MQL0+PT/EP6s/oT4rP8A/"
            "AABAPxdAK79AP3K/AADyvwAAAAArPwAAkD8rP8A/IT+Xv8k+QL/JvsC+l7+hvqu+AAAXwKG+"
            "q75yv0k/wL6AP6E/kD+Av8m+QD+rP0k/qz5Av6E/1j9Av/K/oT4WwIC/ST8AAEm/QL/APvC/"
            "QD+hvsk+AAByv5c/fD7Jvnw/ej7JP3o/AAB8P5y/AADgP8k+lb98Pnw+lT4AANw/+j7JvhW/"
            "lb56vwAAej4CwEk/fL9JP5W+ST/8vvu/4D96Pj2/yb/6vnw+4D96P72/AsD8Pjw/yT4AAJy/"
            "yb5JP54/fD4VPw5AlT56vvq+nL8NQMm+AADJvpe/AACCvzO/rT6iPrM/or5Ivy0/c7+zvqY/"
            "Mz+FP4I/rT5IvyK/rb4iPzM/AAAAAAAAAACivoW/Mz8AADM/AAAzP4K/sz+Fv6K+LT+GP6I+"
            "AACFPgAArb4FPwAA8z8AAII/or4GwDM/rb6tPwAArT4FwKK+878AAHM/AACFP7M/hr8AAA==",
        ),
    },
    "packed 4, negative": {
        "weight_shape": (torch.int64, (2,), "CAAAAAAAAABAAAAAAAAAAA=="),
        "weight_packed": (
            torch.int32,
            (8, 8),
            "eLZ6h2iHaYR6xXxlOyuoRZuY9qx45ow5l2dGidZ3eFa8olc1l5gVRCqHKimkuGqaqbuHijyX"
            "t9e5jFiOBI5qZ6OtKpOCYJCSeUhmipyYaNV5Sqepe6V/gylamXakZmrHeKh6hnqImzabdcpJ"
            "uHioiZ2Ed+m3k5c5uW2WxttZVjhohYynhkm5iIZ7qHpVfYWKldJ9KmjEeZVZvJiFWImXhlWZ"
            "RH7Eiq3HKpeZaCdnmXlAhkdbY775XKlWSUe4enUFZemmsgStIic0N6acNbxkxZrJeWdaVrZl"
            "l6m4qpaldYqMpit4RmuHq5pmiofonFmbaKRwaEuXiGlNaItIiJJ6yQ==",
        ),
        "weight_scale": (torch.bfloat16, (8, 2), "wL63vpK+gD6Qvra+yj6RPsK+dL6iPpE+T76+vso+sD4="),
        "values": (
            torch.bfloat16,
            (8, 64),
            "AIDAPkA/kL9Av8A+wD4AgACAQD/APgCAwL5AP8A/AIBAv8A+kD/Av8C/wD6QP0A/kL/wP5C/"
            "EEAAgEC/kD/AP4m/t74AgLe+Nz8gwLe/N78AgLc+Nz8JwLe/AIC3vuU/tz63vrc+Nz83P7c/"
            "t74AgDc/5b+3Prc+AIC3Pjc/iT+Sv1u/2z8Sv5I+Wz9bP7Y/kj6SvgCAkr5bPwBAkj+SPxK/"
            "2z+SPgCAEr/bP5K+2z+SPxK/AIBbvxK/Ej8Sv5K+gD4AP0A/QD+AvgAAAD8AAIA/oL+AvoA+"
            "gL5AP4C+oD+APkA/gD8AAAAAQL/APwAAgL8AwMA/AAAAPwC/gL4Av7Q/EL+0vxC/EL/YP7Q/"
            "kL7YPwCAEEAQPxBAkL7YP5C+kL6QPgCAkD8QPxA/EL8AgJC/kL4AgJC+AIAQP1g/tL+2vrY+"
            "Nr+2P7Y+Nr+2vja/iL+2Pog/Nr8fwLY+5D8AgLa+CEA2v4g/tr62vjY/tj62Pza/Nj82Pza/"
            "Nj+2Pra/AADKvgAASj9KP8q+Sr8AAEo/yr4AAAAAmD/KPkq//L+YP8o+mL/Kvko/yj/KPsq/"
            "AACYPwAAyr4AAEo/yj4AALU/kT6RvwAAkb6RvpE+2j+Rvlo/tb+RPpG+kT6RPrW/kT5aP7U/"
            "Eb8Rv5E+Eb+RP1o/tT+RPlq/Eb9avwAAtb8AgEI/kj8AgMK/AIDCPkK/Qj8AgMK+wj/CvpK/"
            "AIAAgEI/AICSv8I+AIBCv0K/wj6SP5I/8r/CPpI/AIBCvwCANz90vrc/mL+Yv3Q+9L63PwCA"
            "9D50P3S/dL50Pjc/dL50vjc/dL83vwCAdL43PwCAAIA3P3S+AIB0PnS+9D4AgHO/c7+iPqI+"
            "or+iv/M/or6iv6I/Ij8AAMo/Ij+ivqI/Ij/zv6K+oj6iPqI+AAAiv6K+87+iviK/oj6iPqI+"
            "or4RwJG/Eb8AAJG+kb9aP1q/tb8Rv9o/Wj+RPv4/kT9av5E+ET8Rv1q/kT6Rv5G+kb8AAFo/"
            "ET+Rvlq/kb5avxHAGz/PPk++m7/PPs++mz8bv08/zz+Bv8++mz+bP08+mz9PP4E/Tz6BP88+"
            "z75Pv0++Gz+BP0+/G79PP88+Gz9Pvz6/vr6+vr6/vr6+Pr4+Pj8+v44/Pj+OPz4/jr+OPz4/"
            "vj6+vr6+Pr8AgI6/Pr8+vz4/vr6OPz6/jj++Pj6/AIDKPwAASr9KP5g/GMAAAMq+Sr/Kv5g/"
            "Sr/KvgAAmD9KP0o/yj5Kv0q/Sj8AAMq+AAAAABhAyj/KPso+mL+YP8o+AAAwv7C/MD8wwLC+"
            "AAAwv4Q/sL+wvrA+AAAAALA+ML/cP7C/AAAwv4Q/AAAAALC/AAAAAATAsD4wP7C+sD6wPw==",
        ),
    },
    "int 8, negative": {
        "weight": (
            torch.int8,
            (4, 32),
            "/hLYGBEG7qTM8P4LEAr18cLvG/ftABX22x0y7er4F/rqA/QVJMy62gnNCvceDvRABwbi8w0X"
            "8fkHDxULD8/zXATYHgcHDCYozgoTCLoQ5NAY7CISFuC09cTQEhj7yjLwFSAzJhr5+eKWCirc"
            "qdTqJsAf0dQwL/0OvvrCBwA9/U8=",
        ),
        "weight_scale": (torch.bfloat16, (4, 1), "7TzwvLa8sTw="),
        "values": (
            torch.bfloat16,
            (4, 32),
            "bb0FP5S/Mj/8PjI+Bb8qwMG/7b5tvaM+7T6UPqO+3r7mv/y+SD+Fvg2/AAAcP5S+ib9XP7k/"
            "Db8jv22+Kj8yviU/tL20Ph6/h7/DPwNAjj+Hvr8/lr6HPmG/0r60PvC/Ur40vmE/wz7Dviy/"
            "4T5SPlK+4b4ev6W+4b64P8M+LMC2vWQ/K78fvh++iL5Yv2S/jj9kvti+Nr7HP7a+Hz+IPwi/"
            "5D5Bv82++r42P9g/ej6rP4g/zb4Iv+Q9mj+Ov7Y+6D4xP40/Uj8QPxu+G74mvxPAXT5oP0e/"
            "8b9zv/O+Uj+xvys/gr9zv4U/gj+FvZs+t78Fvqu/Gz4AAKk/hb3aPw==",
        ),
    },
}
